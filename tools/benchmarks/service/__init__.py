"""The compared views behind a real server: settings, addresses, and how the server is started."""
