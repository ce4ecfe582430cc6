//! The Unix-domain socket of a server: private to its user.

use crate::runtime;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tokio::net::{UnixListener, UnixStream};

/// A socket's path, removed when the server that made it is gone.
#[derive(Debug)]
pub struct UnixPath {
    path: PathBuf,
    /// A forked child has a copy of this guard, but not the server.
    generation: u64,
}

impl UnixPath {
    pub fn as_path(&self) -> &Path {
        &self.path
    }
}

impl Drop for UnixPath {
    fn drop(&mut self) {
        if self.generation == runtime::generation() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Binds with mode 0600. A socket that an earlier process left behind is replaced.
pub fn bind(path: &Path) -> io::Result<(UnixListener, UnixPath)> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    let guard = UnixPath { path: path.to_owned(), generation: runtime::generation() };
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok((listener, guard))
}

pub fn require_own_user(stream: &UnixStream) -> io::Result<()> {
    let peer = stream.peer_cred()?.uid();
    let own = rustix::process::geteuid().as_raw();
    if peer == own || peer == 0 {
        return Ok(());
    }
    let text = format!("the peer runs as user {peer}, this process as user {own}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}
