"""Reports: pictures and tables of what a run did."""
