"""`wholestep search`: which of many ways to run a model is the fastest, found by predicting all of them and measuring few."""
