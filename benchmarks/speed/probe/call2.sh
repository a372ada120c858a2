cd benchmarks/speed/probe; export PYTHONPATH=$PWD/../../../src
(cd ../../..; timeout 100 python3 -m pytest tests/test_cuda.py -q -p no:cacheprovider > $OUT/cuda.txt 2>&1); tail -4 $OUT/cuda.txt
for p in big bigbf16 small smallbf16 softmax logistic; do timeout 45 python3 where.py $p > $OUT/$p.txt 2>&1; done
timeout 40 python3 wide.py > $OUT/wide.txt 2>&1
OMP_NUM_THREADS=1 timeout 40 python3 where.py fair > $OUT/fair1.txt 2>&1
OMP_NUM_THREADS=8 timeout 40 python3 where.py fair > $OUT/fair8.txt 2>&1
grep -h "ROUND\|^bind\|FAIR" $OUT/*.txt; cat $OUT/wide.txt
