# every file of tests in a process of its own, some at a time; what remains after the limit is named
cd "$(dirname "$0")/../../.."; export PYTHONPATH=$PWD/src OMP_NUM_THREADS=1
${PY:-python3} - <<'P'
import importlib.util as u
print("missing:", *[n for n in ("numpy","scipy","sklearn","matplotlib","rich","typer","click","safetensors","pytest","xdist","hypothesis","pandas","pydantic","joblib","pyarrow","filelock","jinja2","yaml","psutil","PIL","cryptography","statsmodels","lifelines","mpmath","cvxpy","threadpoolctl","openpyxl","tomli_w") if u.find_spec(n) is None])
P
timeout 100 ${PY:-python3} -m pytest tests/test_cuda.py -q -p no:cacheprovider -x > $OUT/cuda.txt 2>&1; echo "test_cuda rc $?"; tail -3 $OUT/cuda.txt
mkdir -p $OUT/tests
find tests -name "test_*.py" ! -name test_cuda.py | timeout ${1:-150} xargs -P 14 -I{} sh -c 'n=$(echo {} | tr / _); timeout 100 ${PY:-python3} -m pytest {} -q -p no:cacheprovider -rsE --tb=short > $OUT/tests/$n.txt 2>&1; echo "$? {}" >> $OUT/tests.rc'
grep -v "^[05] " $OUT/tests.rc; wc -l $OUT/tests.rc; find tests -name "test_*.py" | wc -l
grep -h " passed\| skipped\| failed" $OUT/tests/*.txt | tail -400 | ${PY:-python3} -c "
import re,sys
t={}
for line in sys.stdin:
    for n,w in re.findall(r'(\d+) (passed|failed|skipped|error)',line): t[w]=t.get(w,0)+int(n)
print(t)"
