"""`tideserve doctor`: diagnoses a cluster; each finding is a sentence with a remedy."""
