import time, torch, sys
sys.path.insert(0,'.')
from wan_core.config import *
from wan_core.vae import VideoVAE, TileSpec
import wan_core.vae.vae as V
torch.backends.cudnn.benchmark=False
print(torch.__version__, torch.backends.cudnn.version(), torch.cuda.get_device_name())
def t(f,n=2):
    f(); torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); ts=[]
    for _ in range(n):
        a=time.time(); f(); torch.cuda.synchronize(); ts.append(time.time()-a)
    return f'{min(ts):.3f}s peak {torch.cuda.max_memory_allocated()/2**30:.2f} GiB'
own=V.VideoVAE._to_own
def cl(self,x): return own(self,x).contiguous(memory_format=torch.channels_last_3d)
@torch.inference_mode()
def main():
    for name,c,s in (('2.1',VAE_21,8),('2.2',VAE_22,16)):
        torch.manual_seed(0)
        vae=VideoVAE(c).cuda().bfloat16().eval()
        lat=torch.randn(1,c.z_dim,21,720//s if s==8 else 44,1280//s,device='cuda',dtype=torch.bfloat16)
        vid=torch.rand(1,3,81,lat.shape[3]*s,lat.shape[4]*s).mul_(2).sub_(1).bfloat16().cuda()
        ref=None
        for fmt in ('contig','cl','cl+w'):
            V.VideoVAE._to_own = own if fmt=='contig' else cl
            if fmt=='cl+w':
                for m in vae.modules():
                    w=getattr(m,'weight',None)
                    if w is not None and w.ndim==5: w.data=w.data.contiguous(memory_format=torch.channels_last_3d)
                    if w is not None and w.ndim==4: w.data=w.data.contiguous(memory_format=torch.channels_last)
            for chunk in (1,2):
                def d():
                    for f in vae.decode_stream(lat,chunk=chunk): pass
                try:
                    print(name,fmt,'decode chunk',chunk,t(d,1),flush=True)
                    if chunk==1: print(name,fmt,'encode chunk',chunk,t(lambda: vae.encode(vid,chunk=chunk),1),flush=True)
                except torch.OutOfMemoryError as e: print('oom')
            y=vae.decode(lat[:,:,:3,:32,:32]); ref=y if ref is None else ref
            print('diff',(y-ref).abs().float().mean().item())
        print(name,'tiled decode',t(lambda: vae.decode(lat,tile=TileSpec(height=32,width=32,overlap=8)),1))
main()
