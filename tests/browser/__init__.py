"""Pages in a real browser: headless Chromium, as Debian packages it. Skipped where it is not installed."""
