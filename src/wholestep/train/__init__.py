"""Training loops. For now one tiny example that needs nothing but this package."""
