"""A pack for a ComfyUI older than its node Model Sparse Attention: a node of that name with the same rule, by
comfy-kitchen's `sol_attn` (0.2.40 or newer) in an attention override. Copied into custom_nodes; imports nothing of this
project. The rule: dense before `start_percent` and after `end_percent`, below 12,288 tokens and where keys are not
queries; else blocks above the threshold tau, and the 256 best tokens beyond them, as the node has them by default."""

import logging

import torch

FEWEST_TOKENS, EXTRA_TOKENS = 12288, 256


class BlockSparseAttention:
    CATEGORY, FUNCTION, RETURN_TYPES = "stand-in", "run", ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        share = ("FLOAT", {"default": 1.0, "min": 0.0, "max": 1.0})
        tau = ("FLOAT", {"default": 1.3, "min": 0.0, "max": 4.0})
        needed = {"model": ("MODEL",), "selection": (["sol-attn"],), "selection.tau": tau}
        return {"required": needed | {"start_percent": share, "end_percent": share}}

    def run(self, model, selection, start_percent, end_percent, **method):
        changed = model.clone()
        options = changed.model_options["transformer_options"]
        sigmas = model.get_model_object("model_sampling")
        window = [float(sigmas.percent_to_sigma(share)) for share in (start_percent, end_percent)]
        before = options.get("optimized_attention_override")
        options["optimized_attention_override"] = attention(before, method["selection.tau"], *window)
        return (changed,)


def attention(before, tau, first_sigma, last_sigma):
    from comfy_kitchen import sol_attn  # a newer one than this ComfyUI asks for

    told = ""

    def tell(what):
        nonlocal told
        if what != told:
            told = what
            logging.info("sol_attn in an override of this benchmark: %s", what)

    def call(func, q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **more):
        sigma = float(more["transformer_options"]["sigmas"][0])
        tokens = q.shape[2 if skip_reshape else 1]
        if not (last_sigma <= sigma <= first_sigma) or tokens < FEWEST_TOKENS or k.shape != q.shape or mask is not None:
            if k.shape == q.shape:
                tell(f"{tokens} tokens dense")
            options = {"mask": mask, "skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape, **more}
            return func(q, k, v, heads, **options) if before is None else before(func, q, k, v, heads, **options)
        rows = [
            (one.transpose(1, 2) if skip_reshape else one.unflatten(2, (heads, -1))).to(torch.bfloat16)
            for one in (q, k, v)
        ]
        made = sol_attn(*rows, tau=tau, scale=more.get("scale"), token_aug=EXTRA_TOKENS).to(q.dtype)
        tell(f"{tokens} tokens sparse")
        return made.transpose(1, 2) if skip_output_reshape else made.flatten(2)

    return call


NODE_CLASS_MAPPINGS = {"BlockSparseAttention": BlockSparseAttention}
