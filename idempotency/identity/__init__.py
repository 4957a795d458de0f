"""What makes two requests the same: the key, the scope, and the fingerprint of the payload. No models and no I/O."""
