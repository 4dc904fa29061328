import os
from tests.devices import cases
def test_x(compile_cases):
    import time
    names=[n for n in cases.CASES if "sharded" not in n]
    for dev,kw in (("Ascend",{}),("GPU",{})):
        a=time.time(); r=compile_cases(names,device=dev,**kw); print(dev,time.time()-a)
        for n,c in r.items():
            print("  ",n, "OK" if not c.error else c.error[:300].replace("\n"," "))
