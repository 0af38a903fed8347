"""What a model is, as plain values: traced once, then asked by everything that plans."""
