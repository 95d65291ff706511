"""``iris-bench host``: what queueing a call takes the host, by layer of software."""
