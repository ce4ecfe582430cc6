//! The corpus of the fuzz targets, fed to them once: they compile, and what was found stays mended.

#[path = "../../fuzz/src/lib.rs"]
mod targets;

use std::path::Path;

fn feed(name: &str, target: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
    let mut fed = 0;
    for entry in std::fs::read_dir(&folder).expect("a folder for each target") {
        let path = entry.expect("readable").path();
        println!("{}", path.display());
        target(&std::fs::read(path).expect("readable"));
        fed += 1;
    }
    assert!(fed > 0, "{} is empty", folder.display());
}

#[test]
fn certificates() {
    feed("certificates", targets::certificates::run);
}

#[test]
fn descriptors() {
    feed("descriptors", targets::descriptors::run);
}

#[test]
fn frames() {
    feed("frames", targets::frames::run);
}

#[test]
fn messages() {
    feed("messages", targets::messages::run);
}

#[test]
fn metadata() {
    feed("metadata", targets::metadata::run);
}
