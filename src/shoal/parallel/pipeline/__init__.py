"""The model cut into stages along the pipeline axis."""
