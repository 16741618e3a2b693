"""`tideserve doctor`: what is wrong with a cluster, each in one sentence with a remedy."""
