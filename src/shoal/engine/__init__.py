"""Assembly: a job and its settings become a run; the step, the loop, and what they need."""
