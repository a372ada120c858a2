export PYTHONPATH=$PWD/src
OMP_NUM_THREADS=8 timeout 100 python3 benchmarks/speed/gpu.py --only rounds --out benchmarks/speed/gpu.json > $OUT/gpu.txt 2>&1; cp benchmarks/speed/gpu.json $OUT/gpu.json; grep "^A round\|rror" $OUT/gpu.txt
timeout 100 python3 -m pytest tests/test_cuda.py -q -p no:cacheprovider > $OUT/cuda.txt 2>&1; echo "rc $?"; tail -12 $OUT/cuda.txt
