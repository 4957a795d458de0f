"""Pages in a real browser: headless Chromium from Debian. Skipped if it is not installed."""
