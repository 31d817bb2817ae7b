"""Runtime: the Step that users call, and what feeds it."""
