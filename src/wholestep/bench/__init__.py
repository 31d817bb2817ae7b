"""The benchmark: representative trainings of many domains, and one harness that measures every system on them alike."""
