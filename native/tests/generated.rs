//! The committed code is what the .proto generates. `UPDATE_GENERATED=1 cargo test --test generated` writes it anew.

use prost::Message;
use std::path::{Path, PathBuf};

#[test]
fn the_committed_code_is_what_the_proto_generates() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let protos = root.join("../protos");
    let out = tempfile_dir();
    let descriptors: prost_types::FileDescriptorSet =
        protox::compile(["inter_deployment.proto"], [&protos]).expect("the proto is valid");
    tonic_prost_build::configure()
        .build_client(false)
        .out_dir(&out)
        .compile_fds(descriptors.clone())
        .expect("code is generated");
    let generated = std::fs::read_to_string(out.join("ray_serve_grpc.v1.rs")).unwrap();
    let committed = root.join("src/proto/ray_serve_grpc.v1.rs");
    let described = root.join("src/proto/ray_serve_grpc.v1.descriptors");
    if std::env::var_os("UPDATE_GENERATED").is_some() {
        std::fs::write(&committed, &generated).unwrap();
        std::fs::write(&described, descriptors.encode_to_vec()).unwrap();
    }
    assert!(
        std::fs::read_to_string(&committed).unwrap() == generated
            && std::fs::read(&described).unwrap() == descriptors.encode_to_vec(),
        "run UPDATE_GENERATED=1 cargo test --test generated"
    );
}

fn tempfile_dir() -> PathBuf {
    let path = std::env::temp_dir().join(format!("ray-serve-grpc-generated-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    path
}
