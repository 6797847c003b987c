"""What answers a request: the model in this process, other servers, or a script."""
