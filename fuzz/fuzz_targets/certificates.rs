#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ray_serve_grpc_fuzz::certificates::run(data));
