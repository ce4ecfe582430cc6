//! Certificates of any content: names within the certificate, or none.

use ray_serve_grpc_native::lane::certificate::dns_names;

pub fn run(data: &[u8]) {
    for name in dns_names(data) {
        assert!(name.len() < data.len());
    }
}
