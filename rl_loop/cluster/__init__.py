"""Ray: a local one of our own or a cluster's, and where its actors run."""
