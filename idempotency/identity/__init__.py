"""The identity of a request: its key, its scope, and the fingerprint of its payload. Nothing here does I/O."""
