"""Two sync workers: one for each request that is served at a time, each with a connection that it keeps."""

worker_class = "sync"
workers = 2
preload_app = True
control_socket_disable = True
