"""Two sync workers, each of which serves one request at a time over a persistent database connection."""

worker_class = "sync"
workers = 2
preload_app = True
control_socket_disable = True
