"""The model zoo: small networks of every kind, each with batches, edge batches and optimizers."""
