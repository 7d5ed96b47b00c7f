"""Where published numbers come from: what is copied into `tests/data`, and how sources are named in documents."""

COPIED = (
    "asc_wfbp_infocom21/compute_profile.csv",
    "asc_wfbp_infocom21/contention_100mib_10gbe.csv",
    "asc_wfbp_infocom21/measured_32gpu_10gbe.csv",
    "aws_p5_h100/nccl_efa.csv",
    "bcaffe_infocom19/constants.json",
    "bcaffe_infocom19/googlenet_layers.csv",
    "bcaffe_infocom19/measured_throughput.csv",
    "bcaffe_infocom19/osu_allreduce_10gbe.csv",
    "dawnbench/imagenet_train.csv",
    "ddl_benchmarks_2020/throughput.csv",
    "deeplearningexamples/multinode_throughput.csv",
    "espresso/trace_bert.csv",
    "espresso/trace_bert_large.csv",
    "espresso/trace_gpt2.csv",
    "espresso/trace_resnet101.csv",
    "espresso/trace_resnet50.csv",
    "espresso/trace_vgg16.csv",
    "gcp_a3mega_h100/all_reduce_16gpu.csv",
    "layer_sizes/densenet161.csv",
    "layer_sizes/densenet201.csv",
    "layer_sizes/inception_v4.csv",
    "layer_sizes/resnet152.csv",
    "layer_sizes/transformer_wmt_base.csv",
    "layer_sizes/vgg19.csv",
    "mgwfbp_tpds/alpha_beta.json",
    "mgwfbp_tpds/measured_iteration_16xV100.csv",
    "omgs_infocom20/breakdown_16xP102_1gbe.csv",
    "pipedream/alexnet.csv",
    "resnet18_ddp_8xMI300X/collectives.csv",
    "resnet18_ddp_8xMI300X/gradients.csv",
    "resnet18_ddp_8xMI300X/steps.csv",
    "resnet50_1xV100/steps.csv",
    "resnet50_ddp_2xA100/collectives.csv",
    "resnet50_ddp_2xA100/gradients.csv",
    "resnet50_ddp_2xA100/steps.csv",
    "superbench_a100/nccl_tests.csv",
)
"""Files under `traces/` of the reference folder."""

RECORDS = ("commlib-", "mgwfbp19-", "ssd-", "omgs-")
"""Beginnings of the ids of the records of `paper_tables.json` that are kept."""

ESPRESSO = (
    "Espresso (EuroSys 2023), github.com/zhuangwang93/Espresso, commit a0294e3, Apache-2.0: gradient-ready trace {file}"
)
BCAFFE = (
    "B-Caffe (MG-WFBP, INFOCOM 2019), github.com/shyhuai/B-Caffe, commit 1e8a70d, BSD-2-Clause: {what}; 8 nodes with "
    "one Tesla K80 card each, 10 Gbit/s Ethernet, OpenMPI 3.1.1"
)
SIZES = "sizes: {package}, constructed without weights"
TPDS = (
    "MG-WFBP, TPDS version: github.com/HKBU-HPML/MG-WFBP, commit 5b8ad54, and its authors' plotting data "
    "(github.com/trl730109/DreamDDP, commit bf37762, scripts/tpds); 4 nodes of 4 V100"
)
ASC = "ASC-WFBP (INFOCOM 2021): plotting data in github.com/trl730109/DreamDDP, commit bf37762; 8 nodes of 4 GPUs"
DDL2020 = (
    "github.com/HKBU-HPML/ddl-benchmarks, commit 30de09b, results/2020-05-29; 8 nodes of 4 GPUs (type not stated with "
    "the table)"
)
OMGS = (
    "OMGS-SGD (INFOCOM 2020): plotting data in github.com/HKBU-HPML/OMGS-SGD, commit ac10b98; 16 nodes with one "
    "P102-100 each, 1 Gbit/s Ethernet"
)
GTOPK = "gTop-k (ICDCS 2019): github.com/hclhkbu/gtopkssgd, commit 6f57343, Apache-2.0, scripts/icdcs2019"
COMMLIB = "CommLib / MSTopK / HiTopKComm (MLSys 2021, arXiv 2010.10458); 16 nodes of 8 V100 on a public cloud"
SUPERBENCH = (
    "NCCL tests on 8 A100-SXM4-40GB (NVSwitch): github.com/microsoft/superbenchmark, commit 700d650, MIT, tests/data"
)
GCP = (
    "NCCL tests on 2 nodes of 8 H100, GCP A3 Mega (8 × 200 Gbit/s a node): github.com/lessizzmore/"
    "create-a3mega-ztan-fork, commit 346b825; numbers only"
)
AWS = (
    "NCCL tests on AWS p5.48xlarge (8 H100, EFA 3200 Gbit/s a node): © chang-ning, github.com/crazyguitar/"
    "aws-gpu-communication-benchmark, commit fd167f9, CC-BY-4.0"
)
ASTRA = "astra-sim's validated HGX-H100 constants: github.com/astra-sim/astra-sim, commit 518bd51, MIT"
PIPEDREAM = "PipeDream, github.com/msr-fiddle/pipedream, commit 7db6a1c, MIT: layer profile of AlexNet, batch 128"
