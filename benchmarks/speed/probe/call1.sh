cd benchmarks/speed/probe; export PYTHONPATH=$PWD/../../../src TRITON_CACHE_DIR=/tmp/triton
(nvidia-smi | head -20; free -g | head -2; nproc) > $OUT/machine.txt 2>&1
timeout 110 python3 kernels.py > $OUT/kernels.txt 2>&1
for p in big small softmax; do timeout 60 python3 where.py $p > $OUT/$p.txt 2>&1; done
timeout 75 python3 where.py fair > $OUT/fair.txt 2>&1
bash tests.sh 100 > $OUT/tests.txt 2>&1
tail -25 $OUT/tests.txt; grep -h "ROUND\|bind\|FAIR" $OUT/*.txt; head -3 $OUT/kernels.txt
