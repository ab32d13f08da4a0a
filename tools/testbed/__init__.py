"""A larger miniature that measures what a technique loses: `python -m tools.testbed`. It is not shipped.

Its weights are kept in `benchmarks/testbed`.

| file | what it holds |
|---|---|
| `scenes` | what a clip shows, its caption, and which named colours a video shows |
| `drawing` | textured objects that cross a textured ground, behind a pillar, under a camera that pans |
| `words` | its tokenizer, and captions as token ids |
| `vae` | the video VAE, trained on from the embedded one |
| `latents` | banks of latents with their captions, refilled while training runs |
| `experts` | both experts, text- and image-to-video from the same weights |
| `folders` | the folders that `--model` takes, with samples for `wancore quality` |
| `full_runs` | videos of full runs kept on disk |
| `evaluate` | what the model makes, and what settings lose on it |
"""
