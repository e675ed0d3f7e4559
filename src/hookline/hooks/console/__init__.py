"""Show a run's progress on the console, and measure how long its steps take."""
