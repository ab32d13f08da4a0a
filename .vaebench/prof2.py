import time, torch, sys
sys.path.insert(0,'.')
from wan_core.config import *
from wan_core.vae import VideoVAE
from wan_core.vae.layers import *
def t(f,n=2):
    f(); torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); ts=[]
    for _ in range(n):
        a=time.time(); f(); torch.cuda.synchronize(); ts.append(time.time()-a)
    return f'{min(ts):.3f}s peak {torch.cuda.max_memory_allocated()/2**30:.2f} GiB'
with torch.inference_mode():
    for name,c,y,x in (('2.1',VAE_21,90,160),('2.2',VAE_22,44,80)):
        torch.manual_seed(0)
        vae=VideoVAE(c).cuda().bfloat16(); 
        lat=torch.randn(1,c.z_dim,21,y,x,device='cuda',dtype=torch.bfloat16)
        s=c.spatial_stride
        vid=torch.rand(1,3,81,y*s,x*s).mul_(2).sub_(1).bfloat16().cuda()
        def d():
            for f in vae.decode_stream(lat): pass
        for lay in ('contig','last'):
            if lay=='last': vae.channels_last()
            print(name,lay,'decode',t(d),'encode',t(lambda: vae.encode(vid),1),flush=True)
    vae=VideoVAE(VAE_21).cuda().bfloat16().channels_last(); lat=torch.randn(1,16,4,90,160,device='cuda',dtype=torch.bfloat16)
    def d4():
        for f in vae.decode_stream(lat): pass
    d4()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        d4(); torch.cuda.synchronize()
    for e in sorted(p.key_averages(),key=lambda e:-e.device_time_total)[:16]: print(f'{e.device_time_total/1e3:8.1f} ms {e.count:5d} {e.key[:110]}')
    import torch._dynamo as dy
    for k in ('recompile_limit','cache_size_limit'):
        if hasattr(dy.config,k): setattr(dy.config,k,128)
    vae=VideoVAE(VAE_21).cuda().bfloat16().channels_last(); lat=torch.randn(1,16,21,90,160,device='cuda',dtype=torch.bfloat16)
    ref=[f for f in vae.decode_stream(lat[:,:,:3])]
    for m in vae.decoder.modules():
        if isinstance(m,ResidualBlock): m.compile(dynamic=False)
    a=time.time()
    try:
        got=[f for f in vae.decode_stream(lat[:,:,:3])]; torch.cuda.synchronize(); print('compile',time.time()-a, 'diff',max((g-r).abs().float().mean().item() for g,r in zip(got,ref)),flush=True)
        print('compiled resblocks',t(d)) 
    except Exception as e: print('compile failed',type(e),str(e)[:600])
