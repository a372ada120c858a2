export PYTHONPATH=$PWD/src
timeout 100 python3 -m pytest tests/test_cuda.py -q -p no:cacheprovider --durations=5 > $OUT/cuda.txt 2>&1; tail -12 $OUT/cuda.txt
OMP_NUM_THREADS=8 timeout 220 python3 benchmarks/speed/gpu.py --only rounds fair simulators --out benchmarks/speed/gpu.json > $OUT/gpu.txt 2>&1; cp benchmarks/speed/gpu.json $OUT/gpu.json; grep -v "^{" $OUT/gpu.txt | tail -45
(cd benchmarks/speed/probe; for p in small softmax; do timeout 30 python3 where.py $p > $OUT/$p.txt 2>&1; done)
timeout 60 python3 -m pytest tests --collect-only -q -p no:cacheprovider > $OUT/collect.txt 2>&1; grep -c "::" $OUT/collect.txt; grep "^ERROR\|error" $OUT/collect.txt | head; tail -2 $OUT/collect.txt
bash benchmarks/speed/probe/tests.sh 100 > $OUT/tests.txt 2>&1; tail -30 $OUT/tests.txt
