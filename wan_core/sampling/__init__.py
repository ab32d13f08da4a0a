"""A generation as numbers, and the loop that walks them: plan, schedules, solvers, presets, guidance, step caching."""
