"""GPUs of a Ray cluster: Ray places, watches and replaces; our own launcher does the work inside a node.

`ray` is an extra (`pip install 'wancore[ray]'`), imported only where a cluster is asked for. docs/cluster.md.
"""
