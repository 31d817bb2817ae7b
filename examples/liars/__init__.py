"""Four bugs that were published or reported, each rebuilt as a rewrite of the captured step beside its honest twin."""
