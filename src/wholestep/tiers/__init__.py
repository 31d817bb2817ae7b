"""Memory beyond the card: arenas of the host, files, and how fast the links to them are."""
