//! Memory of this process by where it lies: how a buffer to send is known for one that can be lent as it is.

use super::lock;
use crate::lane::sys::Mapping;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

/// Owners of mappings, by address. Each leaves it when it is dropped.
pub(super) struct Located<T>(Mutex<BTreeMap<usize, (usize, Weak<T>)>>);

impl<T: AsRef<Mapping>> Located<T> {
    pub(super) const fn new() -> Self {
        Located(Mutex::new(BTreeMap::new()))
    }

    pub(super) fn insert(&self, owner: &Arc<T>) {
        let mapping: &Mapping = (**owner).as_ref();
        lock(&self.0).insert(mapping.address(), (mapping.len(), Arc::downgrade(owner)));
    }

    pub(super) fn remove(&self, mapping: &Mapping) {
        lock(&self.0).remove(&mapping.address());
    }

    /// The one whose memory holds all of `bytes`.
    pub(super) fn of(&self, bytes: &[u8]) -> Option<Arc<T>> {
        let start = bytes.as_ptr() as usize;
        let located = lock(&self.0);
        let (from, (length, owner)) = located.range(..=start).next_back()?;
        if start + bytes.len() > from + length {
            return None;
        }
        owner.upgrade()
    }
}
