"""A larger miniature that measures what a technique loses: `python -m tools.judges`. It is not shipped.

Its weights are kept in `benchmarks/testbed`; `tools/testbed` of commit 35959e36 trained them.

| file | what it holds |
|---|---|
| `scenes` | what a clip shows, its caption, and which named colours a video shows |
| `drawing` | textured objects that cross a textured ground, behind a pillar, under a camera that pans |
| `folders` | the folders that `--model` takes, with samples for `wancore quality` |
| `full_runs` | videos of full runs kept on disk |
"""
