"""Training under sampled skip schedules."""
