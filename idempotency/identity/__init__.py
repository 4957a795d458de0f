"""What makes two requests the same: the key, the scope, and the fingerprint of the payload. Nothing here does I/O."""
