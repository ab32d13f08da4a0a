"""Worker processes that run one generation on several GPUs: launcher, supervisor, worker, client."""
