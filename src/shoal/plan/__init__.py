"""How a job is run, as plain values and their arithmetic. No torch."""
