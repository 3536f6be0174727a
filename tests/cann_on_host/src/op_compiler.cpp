// SPDX-License-Identifier: Apache-2.0
// libacl_op_compiler.so: the older interface to single operators. torch_npu builds descriptors with it; running
// an operator through it ends the process with the operator's name.
#include <cstring>
#include <string>
#include <vector>

#include "acl/acl_op_compiler.h"
#include "runtime/runtime.h"

struct aclDataBuffer {
  void* data;
  size_t bytes;
};

struct aclTensorDesc {
  aclDataType type;
  std::vector<int64_t> shape;
  aclFormat format;
};

struct aclopAttr {};

extern "C" {

aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) { return new aclDataBuffer{data, bytes}; }

aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

aclTensorDesc* aclCreateTensorDesc(aclDataType type, int dims, const int64_t* shape, aclFormat format) {
  return new aclTensorDesc{type, std::vector<int64_t>(shape, shape + dims), format};
}

void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }

aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t dim, int64_t* size) {
  *size = desc->shape.at(dim);
  return ACL_SUCCESS;
}

aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->shape.size(); }
aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }

void aclSetTensorDescName(aclTensorDesc*, const char*) {}
aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }

aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }
aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const*) {
  return ACL_SUCCESS;
}
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }

aclError aclopCompileAndExecute(const char* name, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*,
                                aclopEngineType, aclopCompileType, const char*, aclrtStream) {
  cann_on_host::fatal("operator %s (aclop) is not emulated", name);
}

aclError aclopCompileAndExecuteV2(const char* name, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[],
                                  aclDataBuffer*[], aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                  aclrtStream) {
  cann_on_host::fatal("operator %s (aclop) is not emulated", name);
}

aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof "disable"; }

aclError aclGetCompileopt(aclCompileOpt, char* value, size_t room) {
  if (room) std::strncpy(value, "disable", room);
  return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }

aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return ACL_SUCCESS;
}

}  // extern "C"
