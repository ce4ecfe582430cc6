"""`ray-serve-grpc bench`: a payload there and back over each transport, on the user's own cluster."""
