import torch, sys
sys.path.insert(0,'.')
exec(open('.vaebench/bench.py').read().rsplit('main()',1)[0].replace("print(torch.__version__","(lambda *a:None)(torch.__version__"))
with torch.inference_mode():
    vae=VideoVAE(VAE_21).cuda().bfloat16(); V.VideoVAE._to_own=cl
    lat=torch.randn(1,16,4,90,160,device='cuda',dtype=torch.bfloat16)
    for _ in range(2):
        for f in vae.decode_stream(lat): pass
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA,torch.profiler.ProfilerActivity.CPU]) as p:
        for f in vae.decode_stream(lat): pass
        torch.cuda.synchronize()
    print(p.key_averages().table(sort_by='cuda_time_total',row_limit=25,max_name_column_width=60))
