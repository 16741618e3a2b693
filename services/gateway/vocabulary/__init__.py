"""Types that all packages of the gateway share: errors, messages, deltas of an answer."""
