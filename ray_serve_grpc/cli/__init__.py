"""The command `ray-serve-grpc`. What looks at a process runs in replicas too, and needs neither click nor rich."""
