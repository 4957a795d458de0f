"""What makes two requests the same operation: key, scope, and fingerprint of the payload. No models, no I/O."""
