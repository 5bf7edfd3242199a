"""Do the host's part of decoding: requests, batches, memory, and the engine that users call."""
