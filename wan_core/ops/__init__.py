"""What a block computes with: attention kernels, fused passes over memory, quantised linears, custom operators."""
