//! Certificates of any content: names within the certificate, or none.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ray_serve_grpc_native::lane::certificate::dns_names;

fuzz_target!(|data: &[u8]| {
    for name in dns_names(data) {
        assert!(name.len() < data.len());
    }
});
